CREATE OR REPLACE PROCEDURE {stand}(lock_name text, mine text, lowest bigint, wait bigint, delay bigint,
  my_host text, my_pid bigint, my_label text, my_session text,
  INOUT drawn bigint, INOUT ahead bigint, INOUT remains bigint)
LANGUAGE plpgsql AS $procedure$
DECLARE
  head text;
  head_token bigint;
  last bigint;
  until bigint;
  now bigint;
  soonest bigint;
BEGIN
  SELECT l.claim, l.token, l.last_token, l.claims + CASE WHEN l.claim = '' THEN 0 ELSE 1 END,
    CASE WHEN l.standing = 1 THEN l.expires END
    INTO head, head_token, last, ahead, until
    FROM {locks} l WHERE l.name = lock_name AND l.kind = 0 AND l.capacity = 1 FOR UPDATE;
  now := {now};
  SELECT min(f.expires), CASE WHEN head = '' THEN max(f.expires) FILTER (WHERE f.standing = 1) ELSE until END
    INTO soonest, until
    FROM (SELECT c.expires, c.standing FROM {claims} c
      WHERE c.name = lock_name AND c.token > head_token ORDER BY c.token LIMIT {front}) f;
  IF head <> mine AND until > now AND coalesce(soonest > now, true)
    AND NOT EXISTS (SELECT 1 FROM {claims} c WHERE c.claim = mine AND c.name{apart} = lock_name)
  THEN
    drawn := greatest(last + 1, now, lowest);
    remains := until - now;
    INSERT INTO {claims} (name, claim, token, weight, standing, since, expires, lock_delay,
      host, pid, label, session)
      VALUES (lock_name, mine, drawn, 1, 0, now, now + wait, delay, my_host, my_pid, my_label, my_session);
    UPDATE {locks} SET last_token = drawn, claims = claims + 1 WHERE name = lock_name;
  ELSE
    ahead := NULL;
  END IF;
END $procedure$
