"""Commands that stand alone: doctor, plan-context and warm-up."""
