"""A pack of waves."""
