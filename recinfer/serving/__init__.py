"""Serving: clients and servers over one wire format, the engine that answers, and tables on other hosts; see docs/explanation/request.md."""
