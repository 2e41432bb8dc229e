"""What ``dsa-dispatch bench`` measures and how: cases, inputs, peers, clocks, the record and its table."""
