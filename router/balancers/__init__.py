"""The balancers. Beside each policy stands a text that says what it does and when to pick it."""
