"""Requests on their way through the engine: in by the factory and the inbox, live, out by a stream.

SequenceFactory -> Inbox -> RequestRegistry of LiveRequests -> OutputChannel -> OutputStream
"""
