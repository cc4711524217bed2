"""Results beside those that papers print."""
