"""What ``octavo bench`` measures."""
