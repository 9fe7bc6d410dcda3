"""The small archive and the server of the serving tests."""

from tests.serving.conftest import archive, predictor, server  # noqa: F401
