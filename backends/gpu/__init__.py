"""What both GPU backends share: operations around the kernels, planning, memory. Imports no GPU package."""
