"""The generation engine: requests, pages, scheduler, and the forward passes that they plan."""
