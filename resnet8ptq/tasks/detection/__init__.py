"""Objects as boxes, keypoints or masks, evaluated as COCO does."""
