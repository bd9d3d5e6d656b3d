"""Plan how one machine trains: measure nothing, import no torch, decide everything beforehand."""
