"""What a run says about itself: its folder, metrics, live view and other writers."""
