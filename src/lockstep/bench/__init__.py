"""What `lockstep demo`, `lockstep doctor` and `lockstep bench` measure and report."""
