"""Objectives: plain torch functions of vectors of length N; one function per equation, no logits."""
