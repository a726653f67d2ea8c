"""What a network is fed: samples, labels, and which of them are drawn for what."""
