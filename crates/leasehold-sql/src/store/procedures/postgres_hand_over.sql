CREATE OR REPLACE PROCEDURE {hand_over}(lock_name text, mine text, my_session text, listens text,
  INOUT next_claim text, INOUT next bigint, INOUT next_session text)
LANGUAGE plpgsql AS $procedure$
DECLARE
  head text;
  token_of_mine bigint;
  others bigint;
  until bigint;
  now bigint;
  holds boolean;
BEGIN
  SELECT l.claim, l.token, l.claims, CASE WHEN l.standing = 1 THEN l.expires END
    INTO head, token_of_mine, others, until
    FROM {locks} l WHERE l.name = lock_name AND l.kind = 0 AND l.capacity = 1 FOR UPDATE;
  now := {now};
  IF head = '' THEN
    DELETE FROM {claims} c
      WHERE c.claim = mine AND c.name{apart} = lock_name AND c.standing = 1 AND c.expires > now
      RETURNING c.token INTO token_of_mine;
    holds := FOUND;
    others := others - 1;
  ELSE
    holds := head = mine AND until > now;
  END IF;
  IF holds AND others = 0 THEN
    UPDATE {locks} SET claim = '', claims = 0 WHERE name = lock_name;
    next_claim := '';
    next := 0;
    next_session := '';
    RETURN;
  END IF;
  IF holds THEN
    UPDATE {claims} SET standing = 1, since = now
      WHERE name = lock_name AND token = (SELECT c.token FROM {claims} c
        WHERE c.name = lock_name AND c.token > token_of_mine ORDER BY c.token LIMIT 1)
      AND standing = 0 AND expires > now
      RETURNING claim, token, session INTO next_claim, next, next_session;
  END IF;
  IF next IS NULL THEN
    ROLLBACK;
    RETURN;
  END IF;
  UPDATE {locks} SET claim = '', token = next - 1, claims = others WHERE name = lock_name;
  PERFORM set_config('leasehold.left', mine, false);
  COMMIT;
  IF next_session <> my_session AND starts_with(next_session, listens) THEN
    SET LOCAL synchronous_commit = off;
    PERFORM pg_notify(next_session, next_claim || ' ' || next::text);
  END IF;
END $procedure$
