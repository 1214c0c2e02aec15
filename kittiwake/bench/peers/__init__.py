"""Other programs that run the same model, to compare with: one file a peer, behind one small contract."""
