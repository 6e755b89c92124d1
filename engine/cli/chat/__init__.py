"""`engine chat`: a conversation with a running server."""
