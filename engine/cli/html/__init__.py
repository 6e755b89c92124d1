"""HTML reports in one file: no server, no network. `page.py` makes one; `charts.js` draws its charts."""
