"""Names that several servers share."""
