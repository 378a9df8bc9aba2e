"""Client of the policy service."""
