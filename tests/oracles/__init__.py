"""Independent references the model families are checked against; none of them imports kittiwake's model code."""
