"""Many runs that one command makes."""
