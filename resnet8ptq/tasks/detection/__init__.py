"""`task=detection` and `task=keypoints`: boxes and keypoints, evaluated as COCO does."""
