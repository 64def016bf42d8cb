"""What was measured, for readers: tables on a terminal, pages that open without a network."""
