"""Where machines are: classification, NAT, port mapping, and what others see."""
