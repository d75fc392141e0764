"""What the tests are made of: servers, clients, models that misbehave, pages made from runs."""
