import pytest
from hypothesis import given
from hypothesis import strategies as st

from madeira import sealing
from madeira.sealing import Sealer, SealError

OLD, NEW = sealing.generate(), sealing.generate()


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_what_is_sealed_opens_again(text: str) -> None:
    """Whatever text is sealed, the same key gives it back, and the sealed text is told apart from others."""
    sealed = Sealer((OLD,)).seal(text)
    assert sealing.is_sealed(sealed)
    assert Sealer((OLD,)).open(sealed) == text


def test_the_first_key_seals_and_all_of_them_open() -> None:
    """A key is changed without a gap: the new one in front, the old one for what is there."""
    before = Sealer((OLD,)).seal("x")
    both = Sealer((NEW, OLD))
    assert both.open(before) == "x"
    assert not both.is_sealed_by_first(before)
    after = both.seal("x")
    assert both.is_sealed_by_first(after)
    assert Sealer((NEW,)).open(after) == "x"
    with pytest.raises(SealError, match="no key in MADEIRA_SECRET_KEY opens it"):
        Sealer((OLD,)).open(after)


@pytest.mark.parametrize("damage", ["sealed:", "sealed:x", "sealed:é", "sealed:" + "A" * 200])
def test_a_damaged_text_is_refused(damage: str) -> None:
    """What no key has sealed does not open, whatever it looks like."""
    with pytest.raises(SealError):
        Sealer((OLD,)).open(damage)
    assert not Sealer((OLD,)).is_sealed_by_first(damage)


def test_without_a_key_the_remedy_is_told() -> None:
    """Nothing is kept in clear for want of a key."""
    none = Sealer(())
    assert not none.has_key
    with pytest.raises(SealError, match="madeira keygen"):
        none.seal("x")
    with pytest.raises(SealError, match="MADEIRA_SECRET_KEY"):
        none.open(Sealer((OLD,)).seal("x"))


def test_sealing_twice_gives_two_texts() -> None:
    """Equal secrets cannot be recognised in the database."""
    assert Sealer((OLD,)).seal("x") != Sealer((OLD,)).seal("x")
