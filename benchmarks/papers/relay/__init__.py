"""RelayAttention (ACL 2024)."""
