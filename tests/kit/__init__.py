"""The parts of the tests: servers, clients, models that misbehave, pages made from runs."""
