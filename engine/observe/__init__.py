"""What the engine tells about itself: records, metrics, spans, snapshots. It reads; it changes nothing."""
