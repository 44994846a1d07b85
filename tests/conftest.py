"""What every test shares: property tests judge results, never the time they took."""

from hypothesis import settings

settings.register_profile("moet", deadline=None)
settings.load_profile("moet")
