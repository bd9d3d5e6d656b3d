"""Model architectures, one file each: functions of named weights, without state."""
