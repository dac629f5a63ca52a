CREATE PROCEDURE {stand}(lock_name VARBINARY(512), mine {words}, lowest BIGINT, wait_for BIGINT, delay BIGINT,
  my_host {words}, my_pid BIGINT, my_label {words}, my_session {words})
SQL SECURITY INVOKER
BEGIN
  DECLARE head {words};
  DECLARE head_token BIGINT;
  DECLARE last_drawn BIGINT;
  DECLARE ahead BIGINT;
  DECLARE held_until BIGINT;
  DECLARE at_present BIGINT;
  DECLARE soonest BIGINT;
  DECLARE drawn BIGINT;
  DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
  START TRANSACTION;
  SELECT l.claim, l.token, l.last_token, l.claims + IF(l.claim = '', 0, 1), IF(l.standing = 1, l.expires, NULL), {now}
    INTO head, head_token, last_drawn, ahead, held_until, at_present
    FROM {locks} l WHERE l.name = lock_name AND l.kind = 0 AND l.capacity = 1 FOR UPDATE;
  SELECT MIN(f.expires), IF(head = '', MAX(IF(f.standing = 1, f.expires, NULL)), held_until)
    INTO soonest, held_until
    FROM (SELECT c.expires, c.standing FROM {claims} c
      WHERE c.name = lock_name AND c.token > head_token ORDER BY c.token LIMIT {front}) f;
  IF head <> mine AND held_until > at_present AND COALESCE(soonest > at_present, TRUE)
    AND NOT EXISTS (SELECT 1 FROM {claims} c FORCE INDEX (by_claim) WHERE c.claim = mine AND c.name = lock_name)
  THEN
    SET drawn = GREATEST(last_drawn + 1, at_present, lowest);
    INSERT INTO {claims} (name, claim, token, weight, standing, since, expires, lock_delay,
      host, pid, label, session)
      VALUES (lock_name, mine, drawn, 1, 0, at_present, at_present + wait_for, delay,
        my_host, my_pid, my_label, my_session);
    UPDATE {locks} SET last_token = drawn, claims = claims + 1 WHERE name = lock_name;
  END IF;
  COMMIT;
  SELECT drawn, IF(drawn IS NULL, NULL, ahead), IF(drawn IS NULL, NULL, held_until - at_present);
END
