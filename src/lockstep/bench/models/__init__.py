"""`lockstep bench gpu --suite models`: attention as published models call it, beside its peers."""
