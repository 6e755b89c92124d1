"""HTML reports in one file: no server, no network. `page.py` makes one; `timeline.js` draws its charts."""
