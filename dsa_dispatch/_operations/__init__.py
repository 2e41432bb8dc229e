"""The operations: validation, the decision, and the ops they are composed of."""
