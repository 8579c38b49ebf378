"""What work costs, in seconds: published curves as priors, fitted online to what workers report. See README.md."""
