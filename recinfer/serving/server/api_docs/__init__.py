"""The description of the HTTP port for people and their tools: an OpenAPI document of the served models, and its viewer."""
