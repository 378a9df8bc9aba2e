"""One file per fault that was found by breaking the service, named for its symptom."""
