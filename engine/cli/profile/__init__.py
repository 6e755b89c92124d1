"""`engine profile`: a described workload on an engine in this process, and what its iterations say.

Read next: `workload.py` (what is run), `report.py` (the numbers), `advice.py` (what follows from them),
`display.py` (tables), `page.py` (an HTML file), `command.py` (the command); `docs/profile.md` shows how to read it.
"""
