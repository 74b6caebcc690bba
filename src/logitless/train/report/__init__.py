"""HTML reports: of one run, of several compared, and their plots."""
