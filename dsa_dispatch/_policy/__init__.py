"""Who may serve a call: settings, where they come from, and the policy they add up to."""
