"""Instruments: is this installation right, is that function right, where do two runs differ."""
