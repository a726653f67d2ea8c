"""`task=detection`: boxes, evaluated as COCO does."""
