"""The launches of block attention as they were before attention_step.py asks what replaced them; goes once that is answered."""
