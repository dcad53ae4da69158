"""Properties are judged by what they find, not by how long one example took on a busy machine."""

from hypothesis import settings

settings.register_profile("delivery", deadline=None)
settings.load_profile("delivery")
