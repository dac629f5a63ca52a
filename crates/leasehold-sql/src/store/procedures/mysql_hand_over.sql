CREATE PROCEDURE {hand_over}(lock_name VARBINARY(512), mine {words}, my_session {words}, sleeps {words})
SQL SECURITY INVOKER
BEGIN
  DECLARE head {words};
  DECLARE my_token BIGINT;
  DECLARE others BIGINT;
  DECLARE held_until BIGINT;
  DECLARE at_present BIGINT;
  DECLARE holds BOOLEAN;
  DECLARE waits BOOLEAN;
  DECLARE next_token BIGINT;
  DECLARE next_claim {words};
  DECLARE next_session {words};
  DECLARE sleeper BIGINT;
  DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN ROLLBACK; RESIGNAL; END;
  START TRANSACTION;
  SELECT l.claim, l.token, l.claims, IF(l.standing = 1, l.expires, NULL), {now}
    INTO head, my_token, others, held_until, at_present
    FROM {locks} l WHERE l.name = lock_name AND l.kind = 0 AND l.capacity = 1 FOR UPDATE;
  IF head = '' THEN
    SELECT MAX(c.token), MAX(c.expires) INTO my_token, held_until FROM {claims} c FORCE INDEX (by_claim)
      WHERE c.claim = mine AND c.name = lock_name AND c.standing = 1;
    SET others = others - 1;
  END IF;
  SET holds = head IN ('', mine) AND held_until > at_present;
  IF holds THEN
    SELECT c.token, c.claim, c.session, c.standing = 0 AND c.expires > at_present
      INTO next_token, next_claim, next_session, waits
      FROM {claims} c WHERE c.name = lock_name AND c.token > my_token ORDER BY c.token LIMIT 1;
    SET holds = IF(next_token IS NULL, others = 0, waits);
  END IF;
  IF holds THEN
    IF head = '' THEN
      DELETE FROM {claims} WHERE name = lock_name AND token = my_token;
    END IF;
    UPDATE {claims} SET standing = 1, since = at_present WHERE name = lock_name AND token = next_token;
    UPDATE {locks} SET claim = '', token = COALESCE(next_token - 1, token), claims = others WHERE name = lock_name;
  END IF;
  COMMIT;
  SET @leasehold_left = IF(holds, mine, '');
  IF holds AND next_session <> my_session AND LEFT(next_session, CHAR_LENGTH(sleeps)) = sleeps THEN
    BEGIN
      DECLARE CONTINUE HANDLER FOR SQLEXCEPTION BEGIN END;
      SET sleeper = IS_USED_LOCK(next_session);
      IF sleeper IS NOT NULL THEN
        KILL QUERY sleeper;
      END IF;
    END;
  END IF;
  SELECT IF(holds, COALESCE(next_claim, ''), NULL), IF(holds, COALESCE(next_token, 0), NULL),
    IF(holds, COALESCE(next_session, ''), NULL);
END
