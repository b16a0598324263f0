"""The store moves bytes between tiers. It knows no positions, no models, no queue and no policy."""
