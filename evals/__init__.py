"""Evaluations: what is asked, how answers are graded, what a run leaves behind.

Asking and grading are apart: a run folder holds everything that grading needs. Knows no model, no service and no torch;
who answers (and who judges) is handed in by the command line.
"""
