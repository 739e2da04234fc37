"""What both GPU backends share: operations around the kernels, planning, memory. No GPU package is imported here."""
