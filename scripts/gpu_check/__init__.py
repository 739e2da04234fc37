"""What `scripts/gpu-check` runs: both GPU backends judged on a device, or on an emulated one."""
