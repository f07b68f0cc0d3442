"""The slices that TransformerConfig is joined from."""
