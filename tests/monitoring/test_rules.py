"""The rules as promtool reads and runs them: nothing is wrong with them, and each says what it should."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.monitoring.make_rule_tests import FOLDER
from tests.monitoring.prometheus import RULES, program
from tests.monitoring.test_files import PANELS, RULES_AND_CONFIG

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "words", [("check", "config", "prometheus.yml"), ("check", "rules", "rules/recording.yml", "rules/alerts.yml")]
)
def test_promtool_finds_nothing_wrong(words: tuple[str, ...]) -> None:
    """With the configuration, and with the rules."""
    done = subprocess.run([program("promtool"), *words], cwd=RULES_AND_CONFIG, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("title", ["Unfinished deliveries", "Dead letters in all"])
def test_a_figure_is_0_when_nothing_is_to_be_told_and_missing_when_nothing_is_known(title: str, tmp_path: Path) -> None:
    """While there are no dead letters there is no series of them either; without Postgres there is none of the queues' ages."""
    [query] = [target["expr"] for panel in PANELS if panel["title"] == title for target in panel["targets"]]
    names = {"Unfinished deliveries": "madeira_deliveries_waiting", "Dead letters in all": "madeira_dead_letters"}
    queues = {"series": 'madeira_queue_oldest_age_seconds{queue="route"}', "values": "7x5"}
    some = [{"series": f'{names[title]}{{endpoint="{name}"}}', "values": "2x5"} for name in ("one", "two")]
    cases = [([queues], [{"labels": "{}", "value": 0}]), ([queues, *some], [{"labels": "{}", "value": 4}]), ([], [])]
    tests = [
        {"interval": "1m", "input_series": series, "promql_expr_test": [{"expr": query, "eval_time": "5m", "exp_samples": told}]}
        for series, told in cases
    ]
    (tmp_path / "tests.yml").write_text(yaml.safe_dump({"rule_files": [str(RULES / "recording.yml")], "tests": tests}))
    done = subprocess.run(
        [program("promtool"), "test", "rules", "tests.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_sees_each_alert_fire_when_it_should_and_only_then() -> None:
    """Under the series of `alerts.yml`."""
    done = subprocess.run(
        [program("promtool"), "test", "rules", "alerts.yml"], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
